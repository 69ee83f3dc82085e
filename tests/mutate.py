"""Mutations of core's formulas that the tests must notice: `python tests/mutate.py [WORD ...]`.

Each mutation is made in a copy of the package; tests run against the copy. Words select
mutations by file or text. Fails if one is not noticed. `test_house.py` looks for the old texts.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The quick ones first; all of them notice some mutation
TESTS = "matrices core online codecs merges".split()
# (file in core, old text, new text)
MUTATIONS = [
    ("methods/iso.py", "sizes.sum() / rank)\n    top", "sizes.max())\n    top"),
    ("methods/iso.py", "own = own - shared", "own = own + shared"),
    ("methods/wudi.py", "side = base.to(dtype) / norm\n", "side = base.to(dtype)\n"),
    ("methods/wudi.py", "(total.to(dtype) - base) @ side.T", "total.to(dtype) @ side.T"),
    ("methods/wudi.py", "-torch.expm1(-end * values) / values", "1 / (values + 1 / end)"),
    ("methods/wudi.py", "max(floor**2, NULL**2 *", "max(0, NULL**2 *"),
    ("matrices.py", "hypot(0.6 * float", "hypot(0 * float"),
    ("matrices.py", "NULL = 1e-5", "NULL = 1e-9"),
    ("basis.py", "(self.num_bases * self.scale)", "self.num_bases"),
    ("methods/wudi.py", "square.diagonal().mul_(share)", "pass"),
    ("methods/wudi.py", "columns and min(shares) == 1", "columns"),
    ("online.py", "float(own.sum()) / size", "float(own.sum()) / budget"),
    ("gram.py", "add_(rest @ rest.T)", "add_(0)"),
    ("gram.py", "gram=self.gram * torch.outer(w, w)", "gram=self.gram * w"),
    ("basis.py", "norm > WRONG_BASE_RATIO * base_norm", "norm > base_norm"),
    ("basis.py", "> (1 - 1e-6) * torch.outer(lengths, lengths)", "> 1 - 1e-6"),
    ("basis.py", "len(self.tasks) / self.num_bases", "self.num_bases / len(self.tasks)"),
    ("basis.py", '"alpha": -values.alpha}', '"alpha": values.alpha}'),
    ("basis.py", "scales * encoding.recon", "encoding.recon"),
    ("methods/ties.py", "bases.sum(0).sign_()", "bases[0].sign()"),
    ("methods/ties.py", "bases.mul_(sign).clamp_(min=0)", "bases.abs_()"),
    ("methods/ties.py", ".sum(0).clamp_(min=1)", ".sum(0).clamp_(min=2)"),
    ("methods/ties.py", "kept - density * kept[:1]", "kept - density * kept[:1] + 99"),
    ("gram.py", "self.values[encoder.shape[1] :]", "self.values[1:]"),
    ("gram.py", "scales > NULL *", "scales > 1e-30 *"),
    ("encoders/baselines.py", "mean=1 / gram.size", "mean=0"),
    ("encoders/balanced.py", "unit @ root)", "unit @ root / 2)"),
    ("encoders/balanced.py", "best_step * best, 0.0", "best_step * best / 2, 0.0"),
    ("encoders/autoencoder.py", "/ size**2", "/ size"),
    ("encoders/autoencoder.py", "max(COLDEST,", "min(COLDEST,"),
    ("encoders/groups.py", "(most := gains.max()) <= least", "True"),
    ("encoders/groups.py", "> most - least / 2", "== most"),
]  # fmt: skip


def main(words: list[str]) -> int:
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "tvb_mergekit", copy / "tvb_mergekit")
        shutil.copy2(ROOT / "tvb_mergekit_hook.py", copy)
        for file, old, new in MUTATIONS:
            if words and not any(word in f"{file} {old} {new}" for word in words):
                continue
            noticed = fails(copy, copy / "tvb_mergekit/core" / file, old, new)
            missed += not noticed
            told = "caught" if noticed else "NOT CAUGHT"
            print(f"{told:<12}{file:<26}{old} -> {new}", flush=True)
    print(f"{missed} not caught")
    return min(missed, 1)


def fails(copy: Path, path: Path, old: str, new: str) -> bool:
    """Whether the tests fail with this mutation; the file is as before afterwards."""
    names = [ROOT / f"tests/test_{name}.py" for name in TESTS]
    options = ["-xqp", "no:cacheprovider", f"--rootdir={ROOT}", f"-c{ROOT}/pyproject.toml"]
    env = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    text = path.read_text()
    path.write_text(text.replace(old, new))
    words = [sys.executable, "-m", "pytest", *options, *names]
    done = subprocess.run(words, cwd=copy, env=os.environ | env, stdout=subprocess.DEVNULL)
    path.write_text(text)
    assert done.returncode in (0, 1), f"{path.name}: the tests do not run"
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
