"""Mutations of formulas that the tests must notice: `python tests/mutate.py [WORD ...]`.

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
        ("core/learned.py",
         "torch.where(total > 0, weights / total, 1 / count)", "weights / total"),
        ("core/learned.py", "one.diagonal().copy_(diagonal)", "pass"),
        ("core/learned.py", "alpha=sum(weights)", "alpha=1"),
        ("core/learned.py", "right[:, unseen] = bases", "right[:, unseen] = 0 * bases"),
        ("core/learned.py", "solved.T.mul(scales)", "solved.T"),
        ("learn/statistics.py", "1 / (len(examples) * max(1, samples))", "1 / len(examples)"),
        ("learn/statistics.py", "example.start - 1 : -1", "example.start : -1"),
        ("learn/work.py", "self.num_bases / len(self.tasks)", "self.num_bases / 1"),
    ],
    "test_learn_gradients.py -k 'finite or stitched or published or masks or begins'": [
        ("learn/localize.py", "own.sigmoid() * self", "own.tanh() * self"),
        ("learn/localize.py", "self.penalty * own", "-self.penalty * own"),
        ("learn/gradients.py", "value.square() if", "value if"),
        ("learn/data.py", "each.sum(1) / counted.sum(1)", "each.sum(1)"),
        ("learn/data.py", "example.start - 1 : count", "example.start : count"),
        ("learn/descent.py", "1 + math.cos", "2 * math.cos"),
        ("learn/localize.py", "basis != 0, own, -torch.inf)", "basis != 0, own, 0)"),
        ("core/learned.py", "masks.sum(0).clamp_(min=1)", "masks.amax(0).clamp_(min=1)"),
        ("learn/localize.py", "bases_of(plan) * plan.basis.scale,", "bases_of(plan) * 1,"),
        ("learn/localize.py", "weights / weights.sum(0)", "0 * weights + 1 / len(weights)"),
        ("learn/gradients.py", "basis.scale * torch.outer", "torch.outer"),
    ],
    "test_lossless.py": [
        ("tensors/units.py", "15) & 0x7FFF)", "15) & 0x7FFE)"),
        ("tensors/units.py", "over - 255 >> 8", "over >> 8"),
        ("tensors/units.py", "(unit << 1) ^ (unit >> 31)", "unit << 1"),
        ("tensors/units.py", "8 * over_two <", "0 * over_two <"),
        ("tensors/lossless.py", " or _checksum(theta) != checksum", ""),
        ("tensors/lossless.py", "part.copy_(whole[low - first :", "part.copy_(whole[0 * first :"),
    ],
    "test_lossless_store.py -k 'live or weighted or addition'": [
        ("store/export.py", "matrix[used].tolist() == [[1.0]]", "False"),
        ("store/export.py", "float(column[used[0]]) == 1.0", "True"),
        ("store/store.py", "return self.weights\n        return", "pass\n        return"),
    ],
    "test_learn_gradients.py -k 'make_the_model or mixture'": [
        ("learn/gradients.py", "number < more", "number >= blocks - more"),
        ("learn/data.py", "end + weight * total", "end + total / len(tasks)"),
    ],
    "test_matrices.py": [
        ("core/methods/iso.py", "sizes.sum() / rank)\n    top", "sizes.max())\n    top"),
        ("core/methods/iso.py", "alpha=-1)", "alpha=1)"),
        ("core/methods/iso.py", "every.put(count * share, shared)", "every.put(0, shared)"),
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
        ("core/settings.py", "if len(shape) == 3 and not", "if len(shape) == 3 and"),
        ("tensors/merging.py", "tunables.lambda_ * basis.scale\n", "tunables.lambda_\n"),
    ],
    "test_matrix_merges.py": [
        ("tensors/matrices.py", "joined, first + start, first + stop", "joined, start, stop"),
        ("tensors/matrices.py", "part.read(first + start, first + stop", "part.read(start, stop"),
        ("tensors/matrices.py", "min(item.shape[-2:]) < bases", "min(item.shape[-2:]) < 0"),
        ("tensors/matrices.py", "if dtype in (torch.bfloat16, torch.float16):", "if False:"),
        ("core/matrices.py", "flat = kind.smallest_normal *", "flat = 0 *"),
    ],
    "test_sampled.py": [
        ("core/gram.py", "gram.diagonal().mul_(", "gram.diagonal().div_("),
        ("core/methods/wudi.py", "square.diagonal().mul_(share)", "pass"),
        ("core/methods/wudi.py", "norms *= norms.new_tensor(shares).sqrt()", "pass"),
        ("core/methods/wudi.py", "columns and min(shares) == 1", "columns"),
        ("tensors/lossless.py", "(1 / share - 1) ** 2 * held", "(1 / share) ** 2 * held"),
        ("tensors/lossless.py", "/{block}/{name}", "/{name}"),
        ("store/vectors.py", " + tasks.sampled * tasks.lacking.square().diag()", ""),
        ("plugin/items.py", ", share=o.share", ""),
    ],
    "test_task_vectors.py -k 'joins or over_to or generations'": [
        ("core/online.py", "self.gram is not None and", "True and"),
        ("store/forms.py",
         '["tensor_errors"].sum(0).sqrt()', '["tensor_errors"].sum(0)'),
        ("store/report.py", "weights[task] *= scale", "pass"),
        ("store/addition.py", " * scales.outer(scales)", ""),
    ],
    SUMS: [
        ("core/gram.py", "left[:, whole:] @ right[:, whole:].T", "left[:, :0] @ right[:, :0].T"),
        ("core/gram.py", "1.0 if len(shape) > 1", "1.0 if len(shape) > 2"),
        ("core/gram.py", "gram=self.gram * torch.outer(w, w)", "gram=self.gram * w"),
        ("core/gram.py", "else one + two", "else two"),
        ("tensors/summing.py", "base.copy_(values.pop(0))", "base.copy_(values[0])"),
    ],
    f"{MERGING} -k gram_matrix_says": [
        ("core/basis.py", "norm > ratio * base_norm", "norm > base_norm"),
        ("core/basis.py", "> (1 - 1e-6) * torch.outer(norms, norms)", "> 1 - 1e-6"),
    ],
    f"{MERGING} -k merging_equals": [
        ("core/basis.py", "len(self.tasks) / self.num_bases", "self.num_bases / len(self.tasks)"),
        ("core/basis.py", '"alpha": -alpha}', '"alpha": alpha}'),
        ("core/basis.py", "scales * self.encoding.recon", "self.encoding.recon"),
        ("core/basis.py", '"lambda": lambda_ * self.scale,', '"lambda": lambda_,'),
    ],
    f"{MERGING} -k entry_by_entry": [
        ("core/methods/ties.py", "np.float32(-1)", "np.float32(99)"),
        ("core/methods/ties.py", "bases.sum(0).sign_()", "bases[0].sign()"),
        ("core/methods/ties.py", "bases.mul_(sign).clamp_(min=0)", "bases.abs_()"),
        ("core/methods/ties.py", "agreeing.amax(0)", "agreeing.sum(0)"),
        ("core/methods/ties.py", ".sum(0).clamp_(min=1)", ".sum(0).clamp_(min=2)"),
    ],
    f"{MERGING} -k asked_share": [
        ("core/trim.py", "kept - density * kept[:1]", "kept - density * kept[:1] + 99"),
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
    "test_kernels.py -k gram_matrix_equals": [
        ("tensors/kernels.py", "d3 += x3[k] * y3[k]", "d3 += x3[k] * y2[k]"),
        ("tensors/kernels.py", "i, sums.shape[1], TILE)", "i, i + 1, TILE)"),
        ("tensors/kernels.py", "np.triu(upper, 1)", "np.triu(upper, 2)"),
        ("tensors/kernels.py", "for i in range(1, 1 + deltas)", "for i in range(1, deltas)"),
        ("tensors/kernels.py", "norms[number] += _square", "norms[number] = _square"),
    ],
    "test_kernels.py -k 'casts or 16_bit'": [
        ("tensors/kernels.py", "np.uint32(0x7FFF) + odd)", "np.uint32(0x7FFF))"),
        ("tensors/kernels.py", "np.uint32(0xFFF) + odd)", "np.uint32(0x1000) + odd)"),
    ],
    "test_kernels.py -k combinations_equal": [
        ("tensors/kernels.py", "+ w3 * x3[k]", "+ w3 * x2[k]"),
        ("tensors/kernels.py", "place = number * stride + size * at", "place = size * at"),
    ],
    "test_kernels.py -k cuts_pieces": [
        ("tensors/kernels.py", "count, at // chunk, sums", "count, 0, sums"),
        ("tensors/summing.py", "(GramSums.plus, sums, self._sums)",
         "(GramSums.plus, sums[::-1], self._sums)"),
        ("tensors/layout.py", "max(1, most // step) * step", "max(1, most // step) * step + 1"),
    ],
    "test_budget.py -k 'gram_pass or combining'": [
        ("tensors/layout.py", "read = workers * self.buffer_bytes", "read = self.buffer_bytes"),
        ("tensors/layout.py", "written = (pieces + WRITES)", "written = WRITES"),
        ("tensors/layout.py", "computed = workers * 4 * held", "computed = 4 * held"),
    ],
    "test_encoders.py -k groups": [
        ("core/encoders/groups.py", "(most := gains.max()) <= least", "True"),
        ("core/encoders/groups.py", " * float(encoder.max()) ** 2", ""),
        ("core/encoders/groups.py", "> most - least / 2", "== most"),
        ("core/encoders/groups.py", "0.0) * num_bases", "0.0) * 2"),
    ],
    "test_one_pass.py": [
        ("core/encoders/rand_select.py", "known=Level.BASES", "known=Level.RECONSTRUCTIONS"),
        ("tensors/passes.py", "and all(map(GramSums.finite, sums))", ""),
    ],
    "test_lora.py -k 'kind or any_range or dense'": [
        ("tensors/peft_files.py", "math.sqrt(rank) if", "rank if"),
        ("tensors/adapter.py", "place = top * columns", "place = start // columns * columns"),
    ],
    "test_ranks.py -k shares": [
        ("tensors/ranks.py", "(2 * end - nbytes) * count", "end * count"),
    ],
    "test_online.py -k 'not slow'": [
        ("core/online.py", "float(weights.sum()) / size", "float(weights.sum()) / budget"),
    ],
    "test_merges.py -k dtypes": [
        ("plugin/items.py", "promote_types, weights, base", "promote_types, weights[:0], base"),
        ("plugin/items.py", "wanted if base.dtype.is_floating_point else", "saved or"),
    ],
    "test_store_recipes.py": [
        ("plugin/plan.py", "store.shares[order] *", "store.shares[order] + 0 *"),
        ("plugin/plan.py", "(store.tasks)[[*order, *mean]]", "(store.tasks)"),
    ],
    "test_online.py -k 'not slow and (paper or hard)'": [
        ("store/store.py", "return weights / weights.mean()", "return weights"),
        ("store/add.py", "matrix[-1] *= self.inputs.weights[0]", "matrix[-1] *= 1.0"),
    ],
    "test_store.py -k dense_reference": [
        ("core/encoders/linear.py", "np.eye(self.size)), axis=0)", "np.eye(self.size)), axis=1)"),
        ("store/build.py", "[:, None] / len(basis.tasks)", "[:, None] / basis.num_bases"),
    ],
    "test_store_safety.py -k 'undo or would_lose or killed_between'": [
        ("store/writer.py", "(store, new), (previous, store), (new, previous)",
         "(store, new), (previous, store)"),
        ("store/writer.py", "if not folder and", "if False and"),
        ("store/writer.py", "if not _is_state_of(store, previous)", "if False"),
    ],
    "test_store_safety.py -k 'weighted_task or keeps_its_meaning'": [
        ("store/export.py", "/ bases.weights[bases", "* bases.weights[bases"),
        ("store/add.py", "self.bases.num_bases / len(old.tasks)", "1.0"),
    ],
    "test_autoload.py -k 'changed_name or more_parameters'": [
        ("plugin/__init__.py", 'others == "..." and optional', 'others == "..."'),
        ("plugin/__init__.py", "in expected] == expected:", "in expected]:"),
        ("plugin/__init__.py", "_METHODS\", {}).pop(method, None)", "_METHODS\", {})"),
    ],
    "test_wemoe.py -k 'dense_models or finite or resume or chosen'": [
        ("store/routing.py", "bool((r == r[:1]).all())", "bool((r == r[:1]).any())"),
        ("store/routing.py", "self._merged.pop(name, None)", "pass"),
        ("store/routing.py", "cache is None or not cache.get_seq_length()", "True"),
        ("store/routing.py", "/ mask.sum(1, True", "/ (0 * mask + 1).sum(1, True"),
        ("store/routing.py", "return y + (r.to(x)", "return y + 0 * (r.to(x)"),
        ("learn/wemoe.py", "(counted.cumsum(1) == counted) & batch", "batch"),
        ("learn/wemoe.py", "bases[item.name].to(item.out)", "bases[item.name]"),
    ],
    "test_recipe.py": [
        ("core/settings.py", "ratio * tasks + 0.5", "ratio * tasks"),
        ("core/registry.py", "if self.above else self.low <= number", "if self.above else True"),
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
