"""Values to store."""

from db.values import Conditions
from treeopt.types import LatencyPoint

DEVICE = {"name": "Toy 9000", "kind": "cpu", "class_digest": "c" * 64, "instance_digest": "d" * 64}


def conditions(**changes: object) -> Conditions:
    known = {
        "device": DEVICE,
        "model": "toy",
        "fingerprint": "weights-1",
        "dtype": "float32",
        "batch_size": 1,
        "context_len": 64,
        "attention": "sdpa",
        "graph_mode": "eager",
        "cache": "static",
        "kernels": "own",
        "versions": {"torch": "2.13.0"},
    }
    return Conditions(**{**known, **changes})


def point(num_tokens: int, median_s: float = 0.25) -> LatencyPoint:
    samples_s = (median_s * 0.5, median_s, median_s * 1.5)
    return LatencyPoint(num_tokens, median_s, iqr_s=median_s * 0.5, num_samples=3, samples_s=samples_s)
