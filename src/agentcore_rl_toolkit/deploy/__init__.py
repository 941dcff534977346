"""From an agent's folder to an agent runtime on AWS, and away again: image or archive, roles, runtime, proof that it runs."""
