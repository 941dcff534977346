"""A Tinker service for tests and rehearsals: the wire format of its SDK, with a model of your choice behind it."""
