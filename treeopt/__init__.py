"""treeopt: the speculation tree that makes a language model fastest on a machine, with proof."""

from treeopt._version import __version__

__all__ = ["__version__"]
