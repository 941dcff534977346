"""The errors, by their cause."""


class OfficeError(ValueError):
    """The policy asked for something that cannot be done; the message is what the model reads."""


class UnreadableFileError(OfficeError):
    """A file is missing, damaged, or larger than the bounds; an evaluation that needs it fails."""


class TaskError(RuntimeError):
    """The task itself cannot be read or is not complete: never the policy's fault, and never a reward."""
