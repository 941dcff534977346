"""The error of AppWorld itself."""


class AppWorldError(RuntimeError):
    """AppWorld's server is missing, has no data, or does not answer as it should: which is never the fault of the policy."""
