"""The error of AppWorld itself."""


class AppWorldError(RuntimeError):
    """AppWorld's server is missing, has no data, or does not answer correctly. This is never the fault of the policy."""
