"""WEMoE over bases: routed models against dense ones that merge the weights of each sequence."""

import copy
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from commands import refused, tvb
from safetensors.torch import load_file, save_file
from test_learn import TASKS, Case, data_words, facts
from tiny import gpt2, llama, load, mistral
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, DynamicCache

import tvb_mergekit as library
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.routing import Routed, routed_parameters, router_of

PROMPTS = ([3, 1, 4, 1, 5, 9], [2, 7, 1], [8, 2, 8, 1, 8])


def made(make: Any, depth: int = 1, bases: int = 3) -> Routed:
    """A model in float64, with random bases and routers."""
    torch.manual_seed(0)
    model = make().double().eval().requires_grad_(False)
    parameters = dict(model.named_parameters())
    moved, routers = {}, {}
    for name, mlp in routed_parameters(model).items():
        p = parameters[name]
        p += 0.1 * torch.randn_like(p)
        moved[name] = 0.1 * torch.randn(bases, *p.shape, dtype=p.dtype)
        sizes = [32, 32, bases] if depth == 2 else [32, bases]
        routers[mlp] = router_of(sizes).double().requires_grad_(False)
    return Routed(model, routers, moved)


@contextmanager
def routing_of(there: Routed) -> Iterator[None]:
    there.route()
    yield
    there.reset()


def dense(made: Routed, prompt: Sequence[int]) -> dict[str, Tensor]:
    """The weights that the routers give one prompt, MLP after MLP, each seen through the model
    with the earlier ones merged."""
    model = made.model
    theta = {name: p.clone() for name, p in model.named_parameters()}
    for mlp, layers in made.routers.items():
        seen = list[Tensor]()
        noting: Any = lambda m, x, seen=seen: seen.append(x[0])  # noqa: E731
        hook = model.get_submodule(mlp).register_forward_pre_hook(noting)
        torch.func.functional_call(model, theta, kwargs={"input_ids": torch.tensor([prompt])})
        hook.remove()
        r = seen[0][0].mean(0)
        for k in range(0, len(layers), 2):
            r = layers[k].weight @ (r.clamp(min=0) if k else r) + layers[k].bias
        for name, each in made.bases.items():
            if name.startswith(f"{mlp}."):
                theta[name] = theta[name] + sum(float(c) * b for c, b in zip(r, each, strict=True))
    return theta


def padded(prompts: Sequence[Sequence[int]], left: bool) -> dict[str, Tensor]:
    size = max(map(len, prompts))
    rows, masks = [], []
    for prompt in prompts:
        gap = [0] * (size - len(prompt))
        rows.append([*gap, *prompt] if left else [*prompt, *gap])
        masks.append([*gap, *[1] * len(prompt)] if left else [*[1] * len(prompt), *gap])
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


@pytest.mark.parametrize(("make", "depth"), [(llama, 1), (gpt2, 2), (mistral, 1)])
def test_a_batch_is_what_dense_models_give_one_by_one(make: Any, depth: int) -> None:
    there = made(make, depth)
    model, before = there.model, {n: p.clone() for n, p in there.model.named_parameters()}
    plain = model(input_ids=torch.tensor([PROMPTS[0]])).logits
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    wanted: list[tuple[Tensor, dict[int, list[int]]]] = []
    for prompt in PROMPTS:
        with_own = AutoModelForCausalLM.from_config(model.config).double().eval()
        with_own.load_state_dict(dense(there, prompt), strict=False)
        ids = torch.tensor([prompt])
        told = {beams: with_own.generate(ids, **how, num_beams=beams)[0] for beams in (1, 2)}
        ends = {beams: each[len(prompt) :].tolist() for beams, each in told.items()}
        wanted.append((with_own(input_ids=ids).logits[0], ends))
    with routing_of(there):
        rows = model(**padded(PROMPTS, left=False)).logits
        for row, (logits, _) in zip(rows, wanted, strict=True):
            assert (row[: len(logits)] - logits).abs().max() < 1e-6 * logits.abs().max()
        for some in ([0, 1, 2], [1], [2, 2]):
            batch = padded([PROMPTS[k] for k in some], left=True)
            for beams, cache in ((1, None), (2, None), (1, "static")):
                told = model.generate(**batch, **how, num_beams=beams, cache_implementation=cache)
                ends = told[:, batch["input_ids"].shape[1] :].tolist()
                assert ends == [wanted[k][1][beams] for k in some]
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert torch.equal(plain, model(input_ids=torch.tensor([PROMPTS[0]])).logits)
    assert not any("forward" in vars(module) for module in model.modules())


def test_caches_casts_and_wrappers() -> None:
    there = made(llama)
    model, batch, token = there.model, padded(PROMPTS, left=False), torch.tensor([[1]])
    own = [torch.tensor([prompt]) for prompt in PROMPTS[:2]]
    before = model(own[0]).past_key_values
    with routing_of(there):
        with pytest.raises(UserError, match="begin with the prompts"):
            model(token, past_key_values=before)
        wanted = model(**batch).logits
        caches = [DynamicCache(config=model.config) for _ in own]
        for some, cache in zip(own, caches, strict=True):
            model(some, past_key_values=cache)
        with pytest.raises(UserError, match="of other prompts than the last"):
            model(token, past_key_values=caches[0])
        kept = copy.deepcopy(caches[1])
        assert torch.equal(*(model(token, past_key_values=c).logits for c in (caches[1], kept)))
    again = Routed(model, there.routers, there.bases)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up_proj", "q_proj"]))
    again.route()
    assert torch.allclose(tuned(**batch).logits, wanted)
    model.float()
    assert torch.allclose(tuned(**batch).logits, wanted.float(), atol=1e-4)
    again.reset()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("wemoe"))


def loaded(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def attached(folder: Path) -> Routed:
    found = library.attach(loaded(folder), folder)
    assert isinstance(found, Routed)
    return found


def held_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "basis" / "learned" / "routers.safetensors")


def loss_of(model: nn.Module, data: Mapping[str, Any], live: Routed | None = None) -> float:
    total = []
    for ids, start in (each for some in data.values() for each in some):
        if live is not None:
            live.prompts = (torch.arange(len(ids)) < start)[None]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        total.append(float(cross_entropy(logits[start - 1 : -1], torch.tensor(ids[start:]))))
    return sum(total) / len(total)


@pytest.mark.parametrize(
    ("method", "keys"),
    [("basis_ta", {"basis": "balanced", "num_bases": 2}), ("basis_wudi", {"basis": "none"})],
)
def test_routers_lower_the_loss_of_the_merge(case: Case, method: str, keys: dict[str, Any]) -> None:
    source = case.recipe(f"{method}-recipe", method, lambda_=0.4, **keys)
    words = (*case.words, "--no-subsample", "--held-out", 0, "--learning-rate", 0.01)
    merged = case.learn(source, "wemoe", method, *words, "--epochs", 6, "--batch-size", 4)
    tvb("merge", source, case.folder / f"{method}-merged", "--quiet")
    added = load(case.folder / f"{method}-merged")
    assert all(torch.equal(t, added[n]) for n, t in merged.tensors.items())
    held, encoder = held_in(merged.folder), merged.basis["encoder"]
    base, models = load(case.base), [load(path) for path in case.models]
    bases = {name: t for name, t in held.items() if ".router." not in name}
    assert bases and all("mlp" in name for name in bases)
    for name, found in bases.items():
        taus = torch.stack([m[name] for m in models]) - base[name]
        wanted = torch.einsum("im,i...->m...", torch.as_tensor(encoder).float(), taus)
        assert torch.allclose(found, wanted, atol=1e-6)
    live = attached(merged.folder)
    before = loss_of(live.model, case.data)
    model = live.route()
    after = loss_of(model, case.data, live)
    assert after < before - 0.01
    (history,) = facts(merged.folder)["history"]
    assert history["losses"][0] == pytest.approx(before, abs=0.05)
    assert set(live.coefficients) == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert loss_of(live.reset(), case.data) == before
    assert "with routers for its MLPs" in (merged.folder / "README.md").read_text()


def test_prompts_alone_depth_checkpointing_and_a_store(case: Case, tmp_path: Path) -> None:
    prompts = {t: [{"prompt": r["prompt"]} for r in each] for t, each in case.records.items()}
    words = data_words(tmp_path, prompts)
    source = case.recipe("forms", basis="balanced", num_bases=2)
    tvb("build", source, tmp_path / "store", "--quiet")
    short = ("--epochs", 2, "--learning-rate", 0.01, "--held-out", 0, "--depth", 2)
    assert "`prompt` and `response`" in refused("learn", source, "wemoe", *words, "--out", tmp_path)
    plain = case.learn(source, "wemoe", "plain", *words, "--unlabeled", *short)
    told = facts(plain.folder)
    assert told["unlabeled"] and told["depth"] == 2 and told["schedule"]["rate"] == 0.01
    less = case.learn(source, "wemoe", "less", *words, "--unlabeled", *short, "--checkpointing")
    stored = case.learn(tmp_path / "store", "wemoe", "stored", *words, "--unlabeled", *short)
    want, (history,) = held_in(plain.folder), told["history"]
    assert want["model.layers.0.mlp.router.2.weight"].any()
    for other in (less, stored):
        assert held_in(other.folder).keys() == want.keys()
        # Adam gives an entry a step of the rate even if rounding alone decides its sign. Such a
        # step changes the loss by no more than rounding does: some hundred sums in float32.
        (own,) = facts(other.folder)["history"]
        rounding = 1e3 * torch.finfo(torch.float32).eps
        assert own["losses"] == pytest.approx(history["losses"], rel=rounding)


def test_models_and_files_that_do_not_fit(case, tmp_path):
    source = case.recipe("fit", basis="none")
    merged = case.learn(source, "wemoe", "fit-out", *case.words, "--epochs", 1)
    width = loaded(case.base).config.hidden_size
    assert facts(merged.folder)["schedule"]["rate"] == 1 / width
    with pytest.raises(UserError, match="are not the base's"):
        library.attach(loaded(case.base), merged.folder)
    folder = shutil.copytree(merged.folder, tmp_path / "other")
    place = folder / "basis" / "learned" / "routers.safetensors"
    held = held_in(merged.folder)
    name = "model.layers.0.mlp.up_proj.weight"
    cut = {**held, name: held[name][:, 1:].contiguous()}
    for told, metadata, tensors in (
        ("by a later tvb-mergekit", '{"version": 9}', held),
        ("damaged metadata `tvb_learned`", '{"version": ', held),
        (f"no tensor `{name}` of this shape", '{"version": 1, "method": "wemoe"}', cut),
    ):
        save_file(tensors, place, {"tvb_learned": metadata})
        with pytest.raises(UserError, match=told):
            library.attach(loaded(folder), folder)
    place.write_bytes(place.read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged; copy it again"):
        library.attach(loaded(folder), folder)
    words = [case.recipe("no-mlp", basis="none", exclude="mlp"), "wemoe", *case.words, "--quiet"]
    assert "merge moves none of them" in refused("learn", *words, "--out", tmp_path / "no")
    assert set(TASKS) == facts(merged.folder)["examples"].keys()
