"""Run as a script: opens a bundle and launches from it where the whole compiler side is missing.

    python blocked.py BUNDLE

Importing triton, jinja2, sqlalchemy, alembic or optuna raises ImportError, and PATH is empty, so that no C
compiler is found.
"""

from __future__ import annotations

import os
import sys

FORBIDDEN = ("triton", "jinja2", "sqlalchemy", "alembic", "optuna")


def block() -> None:
    """From here on the process has no compiler side: the modules are absent, as if never installed."""
    for name in FORBIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]
    os.environ["PATH"] = ""


def loaded() -> list[str]:
    """Forbidden modules that were imported all the same."""
    return sorted(name for name in FORBIDDEN if sys.modules.get(name) is not None)


def main(path: str) -> None:
    from flashgen.bundle.load import load_bundle, verify_bundle
    from flashgen.spec.attention import CallFacts

    assert verify_bundle(path).ok
    bundle = load_bundle(path, 0)
    record = bundle.manifest.records[0]
    work = record.workload
    spec = work.spec
    assert bundle.ranked(work, bundle.target)[0] == record
    kernel = bundle.kernel(spec, record.config, CallFacts("aligned", tma=True), 0)

    def strides(heads: int, rows: int) -> tuple[int, ...]:
        return (heads * rows * spec.head_dim, rows * spec.head_dim, spec.head_dim, 1)

    q, k = strides(work.heads, work.q_len), strides(work.kv_heads, work.k_len)
    sizes = (work.batch, work.heads, work.kv_heads, work.heads // work.kv_heads, work.q_len, work.k_len)
    env = (4096, 8192, 12288, 16384, 0, *q, *k, *k, *q, *sizes, spec.head_dim, spec.head_dim_v, 0.125)
    kernel.launch(env, 0)
    print("launched", kernel.artifact.name, "forbidden:", loaded())


if __name__ == "__main__":
    block()
    main(sys.argv[1])
