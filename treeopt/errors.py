"""Every error treeopt raises on purpose.

The tree::

    TreeOptError                 root: caught once, in the command line
    ├── InvalidValueError        a value breaks a rule of its type (also a ValueError)
    ├── DocumentError            a file cannot be read, or is not the document it should be
    ├── SearchError              no tree can answer the question as it was asked
    ├── DeviceError              the device cannot be measured or used
    ├── ProfileError             a latency measurement cannot start or go on
    ├── DatabaseError            the database cannot be opened, read or written
    ├── ModelError               a model cannot be loaded, or cannot take a tree
    ├── DecodeError              a text cannot be decoded as asked
    └── TrainingError            prompt tokens cannot be trained or measured as asked

Every message is one line that names the file, field or flag, says what is wrong and how to mend it.
"""

__all__ = [
    "DatabaseError",
    "DecodeError",
    "DeviceError",
    "DocumentError",
    "InvalidValueError",
    "ModelError",
    "ProfileError",
    "SearchError",
    "TrainingError",
    "TreeOptError",
]


class TreeOptError(Exception):
    """Root of every error that treeopt raises on purpose."""


class InvalidValueError(TreeOptError, ValueError):
    """A value breaks a rule of its type.

    Parameters
    ----------
    field : str
        The place inside the value, for example ``marginals[0]``.
    problem : str
        What is wrong and how to mend it, without the place.
    """

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")


class DocumentError(TreeOptError):
    """A file cannot be read or written, or is not the document it should be."""


class SearchError(TreeOptError):
    """No tree can answer the question as it was asked."""


class DeviceError(TreeOptError):
    """The device cannot be measured or used."""


class ProfileError(TreeOptError):
    """A latency measurement cannot start or go on."""


class DatabaseError(TreeOptError):
    """The database cannot be opened, read or written."""


class ModelError(TreeOptError):
    """A model cannot be loaded, or cannot take a tree."""


class DecodeError(TreeOptError):
    """A text cannot be decoded as asked."""


class TrainingError(TreeOptError):
    """Prompt tokens cannot be trained or measured as asked."""
