"""verl: agent loops over remote agents for its V1 trainer. Only `adapter`, `dataset` and `main` need verl."""
