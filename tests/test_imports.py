"""What a fresh process loads: nothing heavy for an import or a call on the CPU."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OFFLINE = ("triton", "jinja2", "sqlalchemy", "alembic", "optuna", "transformers")

CALL = """
import torch, flashgen
q, k, v = (torch.ones(1, 2, 4, 16) for _ in range(3))
out = flashgen.attention(q, k, v, mask="causal")
assert torch.equal(out, torch.ones_like(out))
assert torch.equal(flashgen.sdpa(q, k, v, is_causal=True), out)
assert flashgen.explain(q, k, v).runs == "the reference in float32"
"""

RESOLVE = """
import torch
from flashgen.build.arguments import FACTS
from flashgen.runtime.dispatcher import Dispatcher
from flashgen.runtime.policy import Policy, Source
from flashgen.spec.target import find_target

class Kernel:
    def launch(self, env, stream):
        self.env = env

class Store:
    def ranked(self, workload, target):
        return ()

load = lambda request, config: Kernel()
policy = Policy(sources=[Source("records", Store, load)], load=load)
dispatcher = Dispatcher(policy, lambda i: find_target("nvidia-h200"), lambda i: 0, capturing=lambda: False)
q, k, v = (torch.ones(1, 2, 4, 16, dtype=torch.float16) for _ in range(3))
for _ in range(2):
    dispatcher.attention(q, k, v, "causal", None, None, "bhsd", False)
assert dispatcher.resolves == 1
"""


def heavy(code: str, among: tuple[str, ...]) -> list[str]:
    script = f"import sys\n{code}\nprint(*(name for name in {among!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split() if done.stdout.strip() else []


def test_importing_flashgen_loads_nothing_heavy_not_even_torch() -> None:
    code = (
        "import flashgen; assert 'attention' in dir(flashgen); flashgen.masks.causal(); flashgen.__version__"
    )
    assert heavy(code, (*OFFLINE, "torch")) == []


@pytest.mark.parametrize("code", [CALL, RESOLVE], ids=["a call on the CPU", "a miss and a hit"])
def test_a_call_loads_no_compiler_database_or_tuner(code: str) -> None:
    # torch itself may import some of them; what counts is what FlashGen adds.
    torch_alone = heavy("import torch", OFFLINE)
    assert sorted(set(heavy(code, OFFLINE)) - set(torch_alone)) == []


def test_a_decision_from_a_database_loads_no_alembic_and_renders_nothing_twice(tmp_path: Path) -> None:
    import sample_records as make

    from flashgen.store.db import TuningDB

    work, path = make.workload(), tmp_path / "tuning.db"
    with TuningDB(path) as database:
        database.add(make.record(work=work))
    code = (
        "import os, torch\n"
        f"os.environ['FLASHGEN_CACHE'] = {str(tmp_path / 'cache')!r}\n"
        "from flashgen import api\n"
        f"work = api.Workload.from_json({work.to_json()!r})\n"
        f"assert api.best_record(work, 'nvidia-h200', db={str(path)!r}).workload == work\n"
    )
    unwanted = ("triton", "alembic", "optuna", "jinja2")
    torch_alone = heavy("import torch", unwanted)
    found = [sorted(set(heavy(code, unwanted)) - set(torch_alone)) for _ in range(2)]
    assert found == [["jinja2"], []]


def test_every_public_name_is_there() -> None:
    code = "import flashgen\nfor name in flashgen.__all__: assert getattr(flashgen, name) is not None, name"
    heavy(code, OFFLINE)


def test_help_on_tune_is_that_of_the_function() -> None:
    import flashgen
    from flashgen import api

    assert inspect.getdoc(flashgen.tune) == inspect.getdoc(api.tune)
    assert inspect.signature(flashgen.tune) == inspect.signature(api.tune)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import flashgen

    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = flashgen.atention  # type: ignore[attr-defined]
