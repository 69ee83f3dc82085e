"""Mutations of core's formulas that the tests must notice: `python tests/mutate.py [WORD ...]`.

Each mutation is made in a copy of the package; its tests run against the copy. Words select
mutations by file or text. Fails if one is not noticed. `test_house.py` looks for the old texts.
"""

import os

os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}  # before torch starts

import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import hypothesis
import peft  # noqa: F401 what takes long to import is imported once, before the forks
import pytest

ROOT = Path(__file__).resolve().parent.parent
LOG = "log.txt"
ENCODERS = "test_encoders.py"
MERGING = "test_core_properties.py"
SUMS = f"{MERGING} -k sums_equal"
# (file, old text, new text), by the tests that are to notice them
MUTATIONS: dict[str, list[tuple[str, str, str]]] = {
    "test_learn.py": [
        ("core/learned.py", "merged, unseen * bases", "merged, 0 * bases"),
        ("core/learned.py", "clamp(max=tasks / count)", "clamp(max=1)"),
        ("core/learned.py", "one.diagonal().copy_(diagonal)", "pass"),
        ("core/learned.py", "one, alpha=sum(weights)", "one, alpha=1"),
        ("core/learned.py", "right[:, dead] = unseen *", "right[:, dead] = 0 *"),
        ("core/learned.py", "root).T.mul(scales)", "root).T"),
        ("core/learned.py", "masks.sum(0).clamp(min=1)", "masks.amax(0).clamp(min=1)"),
    ],
    "test_matrices.py": [
        ("core/methods/iso.py", "sizes.sum() / rank)\n    top", "sizes.max())\n    top"),
        ("core/methods/iso.py", "alpha=-1)", "alpha=1)"),
        ("core/methods/iso.py", "outside(base, shared.left), each", "base, each"),
        ("core/methods/wudi.py", "norms[norms == 0] = 1", "pass"),
        ("core/methods/wudi.py", "copy=True).div_(norm)", "copy=True)"),
        ("core/methods/wudi.py", "copy_(total).sub_(base)", "copy_(total)"),
        ("core/methods/wudi.py", "(1 - torch.eye(count)", "(1 + 0 * torch.eye(count)"),
        ("core/methods/wudi.py", "-torch.expm1(-end * values) / values", "1 / (values + 1 / end)"),
        ("core/methods/wudi.py", "max(floor**2, NULL**2 *", "max(0, NULL**2 *"),
        ("core/methods/wudi.py", "2.0**-24 > ROUGH", "2.0**-24 > 1e40 * ROUGH"),
        ("core/methods/wudi.py", "* count**2 *", "* count *"),
        ("core/matrices.py", "hypot(0.6 * float", "hypot(0 * float"),
        ("core/matrices.py", "NULL = 1e-5", "NULL = 1e-9"),
    ],
    "test_merges.py -k 'iso or tsvm or wudi'": [
        ("core/basis.py", "(self.num_bases * self.scale)", "self.num_bases"),
        ("names.py", "dimensions == 2 or", "dimensions == 2 or not"),
    ],
    "test_matrix_merges.py": [
        ("core/matrices.py", "flat = kind.smallest_normal *", "flat = 0 *"),
    ],
    "test_codecs.py": [
        ("core/methods/wudi.py", "square.diagonal().mul_(share)", "pass"),
        ("core/methods/wudi.py", "norms *= norms.new_tensor(shares).sqrt()", "pass"),
        ("core/methods/wudi.py", "columns and min(shares) == 1", "columns"),
    ],
    "test_codecs.py -k joins": [
        ("core/online.py", "self.gram is not None and", "True and"),
    ],
    SUMS: [
        ("core/gram.py", "add_(rest @ rest.T)", "add_(0)"),
        ("core/gram.py", "gram=self.gram * torch.outer(w, w)", "gram=self.gram * w"),
    ],
    f"{MERGING} -k gram_matrix_says": [
        ("core/basis.py", "norm > WRONG_BASE_RATIO * base_norm", "norm > base_norm"),
        ("core/basis.py", "> (1 - 1e-6) * torch.outer(lengths, lengths)", "> 1 - 1e-6"),
    ],
    f"{MERGING} -k merging_equals": [
        ("core/basis.py", "len(self.tasks) / self.num_bases", "self.num_bases / len(self.tasks)"),
        ("core/basis.py", '"alpha": -values.alpha}', '"alpha": values.alpha}'),
        ("core/basis.py", "scales * self.encoding.recon", "self.encoding.recon"),
        ("core/basis.py", '"lambda": values.lambda_ * self.scale,', '"lambda": values.lambda_,'),
    ],
    f"{MERGING} -k entry_by_entry": [
        ("core/methods/ties.py", "np.float32(-1)", "np.float32(99)"),
        ("core/methods/ties.py", "bases.sum(0).sign_()", "bases[0].sign()"),
        ("core/methods/ties.py", "bases.mul_(sign).clamp_(min=0)", "bases.abs_()"),
        ("core/methods/ties.py", "agreeing.amax(0)", "agreeing.sum(0)"),
        ("core/methods/ties.py", ".sum(0).clamp_(min=1)", ".sum(0).clamp_(min=2)"),
    ],
    f"{MERGING} -k asked_share": [
        ("core/methods/ties.py", "kept - density * kept[:1]", "kept - density * kept[:1] + 99"),
    ],
    f"{ENCODERS} -k closed_form": [
        ("core/encoders/linear.py", "self.values[encoder.shape[1] :]", "self.values[1:]"),
        ("core/encoders/linear.py", "1.0 - self.loss / total", "self.loss / total"),
        ("core/encoders/linear.py", "scales > NULL *", "scales > 1e-30 *"),
    ],
    f"{ENCODERS} -k pca": [
        ("core/encoders/pca.py", "vectors.T + 1.0 / size", "vectors.T"),
        ("core/encoders/pca.py", "sizes >= (1 - 1e-9) *", "sizes >= 0 *"),
    ],
    f"{ENCODERS} -k balanced": [
        ("core/encoders/balanced.py", "scales[num_bases - 1 :]", "scales[num_bases:]"),
        ("core/encoders/balanced.py", "unit @ root)", "unit @ root / 2)"),
        ("core/encoders/balanced.py", "best_step * best, 0.0", "best_step * best / 2, 0.0"),
        ("core/encoders/balanced.py", "range(REFINEMENTS)", "range(1)"),
    ],
    f"{ENCODERS} -k authors": [
        ("core/encoders/autoencoder.py", "/ size**2", "/ size"),
        ("core/encoders/autoencoder.py", "max(COLDEST,", "min(COLDEST,"),
        ("core/encoders/autoencoder.py", "0.9, 0.999", "0.9, 0.99"),
    ],
    "test_encoders.py -k groups": [
        ("core/encoders/groups.py", "(most := gains.max()) <= least", "True"),
        ("core/encoders/groups.py", " * float(encoder.max()) ** 2", ""),
        ("core/encoders/groups.py", "> most - least / 2", "== most"),
        ("core/encoders/groups.py", "0.0) * num_bases", "0.0) * 2"),
    ],
    "test_one_pass.py": [
        ("core/encoders/rand_select.py", "known=Level.BASES", "known=Level.RECONSTRUCTIONS"),
    ],
    "test_online.py -k 'not slow'": [
        ("core/online.py", "float(weights.sum()) / size", "float(weights.sum()) / budget"),
    ],
    "test_codecs.py -k dense_reference": [
        ("core/encoders/linear.py", "np.eye(self.size)), axis=0)", "np.eye(self.size)), axis=1)"),
    ],
    "test_recipe.py": [
        ("core/settings.py", "ratio * tasks + 0.5", "ratio * tasks"),
        ("core/registry.py", "AtLeastOne = Annotated[int, Field(ge=1)]", "AtLeastOne = int"),
    ],
}  # fmt: skip


def main(words: list[str]) -> int:
    chosen = [
        (tests, *mutation)
        for tests, mutations in MUTATIONS.items()
        for mutation in mutations
        if not words or any(word in " ".join(mutation) for word in words)
    ]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "tvb_mergekit", copy / "tvb_mergekit")
        shutil.copy2(ROOT / "tvb_mergekit_hook.py", copy)
        for tests, file, old, new in chosen:
            noticed = fails(copy, tests, copy / "tvb_mergekit" / file, old, new)
            missed += not noticed
            said = "caught" if noticed else "NOT CAUGHT"
            print(f"{said:<12}{file:<32}{old} -> {new}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


def fails(copy: Path, tests: str, path: Path, old: str, new: str) -> bool:
    """Whether the tests fail with this mutation; the file is as before afterwards."""
    text, stamp = path.read_text(), path.stat()
    names = [str(ROOT / "tests" / w) if w.endswith(".py") else w for w in shlex.split(tests)]
    options = ["-xqp", "no:cacheprovider", f"--rootdir={ROOT}", f"-c{ROOT}/pyproject.toml"]
    path.write_text(text.replace(old, new))
    try:
        child = os.fork()
        if not child:
            run(copy, [*options, *names])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        path.write_text(text)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    if code not in (0, 1):
        sys.exit(f"{path.name}: the tests do not run: {(copy / LOG).read_text()[-1000:]}")
    return code == 1


def run(copy: Path, words: list[str]) -> NoReturn:
    """Run pytest on the copy of the package, in a forked process, and end the process."""
    code = 3  # of an error in here
    try:
        code = int(_pytest(copy, words))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _pytest(copy: Path, words: list[str]) -> int:
    log = os.open(copy / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    # Hypothesis need not shrink what fails.
    hypothesis.settings.register_profile(
        "mutated", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
    )
    hypothesis.settings.load_profile("mutated")
    return pytest.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
