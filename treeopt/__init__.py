"""treeopt: the speculation tree that makes a language model fastest on a machine, with proof.

Examples
--------
>>> import treeopt
>>> table = treeopt.AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
>>> round(treeopt.search(table, budget=12).acceptance_length, 6)
2.1
"""

from treeopt._version import __version__
from treeopt.artifact import read_document, write_document
from treeopt.errors import TreeOptError
from treeopt.search import search
from treeopt.types import (
    AcceptanceTable,
    DecodeRun,
    LatencyPoint,
    LatencyProfile,
    RankRecord,
    SparseTree,
    SwitchEntry,
    SwitchTable,
    TreeDesign,
    TreeNode,
)

__all__ = [
    "AcceptanceTable",
    "DecodeRun",
    "LatencyPoint",
    "LatencyProfile",
    "RankRecord",
    "SparseTree",
    "SwitchEntry",
    "SwitchTable",
    "TreeDesign",
    "TreeNode",
    "TreeOptError",
    "__version__",
    "read_document",
    "search",
    "write_document",
]
