"""Stores that find the task of a prompt: scores, chosen weights, files of gates."""

import math
import threading
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import worlds
from commands import recipe, tvb, write
from safetensors.torch import load_file
from test_learn import loaded, padded
from test_lora import train
from tiny import family, gpt2, llama, load
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

import tvb_mergekit as library
from tvb_mergekit import UserError
from tvb_mergekit.names import looked_at
from tvb_mergekit.store import routing

TASKS = ("math", "code", "safety")
FORMS = {"dense": ["--dtype", "float32"], "lossless": ["--lossless"], "sampled": ["--keep", 0.3]}
DEEP = partial(llama, num_hidden_layers=3)
MAKES = {"llama": DEEP, "gpt2": gpt2}
TARGETS = {"llama": ["v_proj", "up_proj"], "gpt2": ["c_attn", "c_fc"]}
WAYS = [*((make, form) for make in MAKES for form in FORMS), ("llama", "lora"), ("gpt2", "lora")]
PROMPTS = ([3, 1, 4, 1, 5, 9], [2, 7, 1], [8, 2, 8, 1, 8], [5, 5])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(base, models or adapters, store) of a make and a form, built by the command."""

    @cache
    def get(make: str, form: str) -> tuple[Path, Sequence[Any], Path]:
        folder = tmp_path_factory.mktemp(f"{make}-{form}")
        base, listed = family(folder, MAKES[make], TASKS, dtypes=[torch.bfloat16])
        paths: Sequence[Any] = listed
        if form == "lora":
            for seed, task in enumerate(TASKS):
                train(base, folder / "lora" / task, seed, r=3, target_modules=TARGETS[make])
            paths = [f"{base}+{folder / 'lora' / task}" for task in TASKS]
        path = write(recipe("basis_ta", base, paths, {}, basis="none"), folder / "recipe")
        tvb("build", path, folder / "store", "--quiet", *FORMS.get(form, []))
        return base, paths, folder / "store"

    return get


def reference(
    base: Path, store: Path, prompts: Sequence[Sequence[int]], texts: Sequence[Tensor]
) -> Tensor:
    """Scores in float64 by full SVDs of whole differences, prompt by prompt."""
    model, kind = loaded(base).double(), loaded(base).config.model_type
    names = ["transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"]  # layer 0 of 2
    if kind != "gpt2":  # 0 and 1 of 3
        names = [f"model.layers.{layer}.self_attn.{x}_proj" for layer in (0, 1) for x in "qkvo"]
    live, theta = library.attach(loaded(base), store, base), model.state_dict()
    gates: list[list[Tensor]] = [[] for _ in TASKS]
    for own, task in zip(gates, TASKS, strict=True):
        tuned = live.use(task).state_dict()
        names = [n for n in names if not torch.equal(tuned[f"{n}.weight"], theta[f"{n}.weight"])]
        for each in names:
            matrix = tuned[f"{each}.weight"].double() - theta[f"{each}.weight"]
            _, sizes, rows = torch.linalg.svd(matrix.T if kind == "gpt2" else matrix)
            own.append(rows[: min(4, int((sizes > 0.1 * sizes[0]).sum()))])

    def shares(ids: Sequence[int]) -> Tensor:
        seen: list[Tensor] = []
        for each in names:
            model.get_submodule(each).register_forward_pre_hook(lambda m, x: seen.append(x[0][0]))
        model(torch.tensor([ids]))
        for each in names:
            model.get_submodule(each)._forward_pre_hooks.clear()
        ends = routing.ENDS
        seen = [torch.cat([x[1 : 1 + ends], x[1 + ends :][-ends:]]) for x in seen]
        ratio = [[((x @ v.T) ** 2).sum(1) / (x**2).sum(1) for v in own]
                 for x, own in zip(seen, zip(*gates, strict=True), strict=True)]  # fmt: skip
        return torch.tensor([[float(r.mean()) for r in each] for each in ratio]).log()

    said = torch.stack([shares(text.tolist()[0]) for text in texts])
    mean, deviation = said.mean(0), said.std(0)
    size = ((said - mean) / deviation).mean(1).var(0).mean().sqrt()
    return torch.stack([((shares(p) - mean) / deviation).mean(0) / size for p in prompts])


def batch_of(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    batch = padded(prompts, left=True)
    return batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize(("make", "form"), [way for way in WAYS if way[1] != "sampled"])
def test_scores_are_those_of_dense_float64(
    make: str, form: str, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _, store = stored(make, form)
    monkeypatch.setattr(routing, "ENDS", 2)
    (live := library.attach(loaded(base), store, base)).route()
    live.choose(**batch_of(PROMPTS))
    found = torch.tensor([[own[task] for task in TASKS] for own in live.scores])
    texts = routing.plain_texts(loaded(base), base)
    assert len(texts) > len(routing.plain_texts(loaded(base), None)) > 0
    assert (found - reference(base, store, PROMPTS, texts)).abs().max() < 0.2  # of a flat spectrum


def test_adapters_that_began_at_random_are_told_apart(tmp_path: Path) -> None:
    base, _ = family(tmp_path, partial(llama, num_hidden_layers=4), ())

    def prompts(number: int, count: int) -> Tensor:
        words = torch.randint(40, 96, (count, 8))
        words[:, 1::3] = torch.tensor([10, 20, 30]) + number  # the template
        return words

    for number, task in enumerate(TASKS):
        torch.manual_seed(number)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        model = peft.get_peft_model(loaded(base), config)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for _ in range(40):
            logits = model(prompts(number, 32)).logits[:, -1]
            cross_entropy(logits, torch.full((32,), 50 + number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(tmp_path / task)
    paths = [f"{base}+{tmp_path / task}" for task in TASKS]
    path = write(recipe("basis_ta", base, paths, {}, basis="none"), tmp_path / "recipe")
    tvb("build", path, tmp_path / "store", "--quiet")
    (live := library.attach(loaded(base), tmp_path / "store", base)).route()
    for number, task in enumerate(TASKS):
        live.choose(input_ids=prompts(number, 40))
        assert sum(max(own, key=own.__getitem__) == task for own in live.scores) >= 38


def by_last_token(gate: Any, given: Any) -> Tensor:
    """Scores by the last token of a prompt: 9 is math, 1 code, 8 safety, and others the base."""
    return 2.0 * (given["input_ids"][:, -1:] == torch.tensor([9, 1, 8]))


CHOSEN = ["math", "code", "safety", None]


@pytest.mark.parametrize(("make", "form"), WAYS)
def test_each_sequence_has_the_weights_of_its_task(
    make: str, form: str, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _, store = stored(make, form)
    monkeypatch.setattr(routing.Gate, "scores", by_last_token)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    fixed = library.attach(loaded(base), store, base)
    logits, said = [], []
    for prompt, task in zip(PROMPTS, CHOSEN, strict=True):
        model = fixed.use({task: 1.0} if task else {})
        logits.append(model(torch.tensor([prompt])).logits[0])
        ends = {n: model.generate(torch.tensor([prompt]), **how, num_beams=n)[0] for n in (1, 2)}
        said.append({beams: each[len(prompt) :].tolist() for beams, each in ends.items()})
    live = library.attach(model := loaded(base), store, base)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert live.route() is model
    for some in ([0, 1, 2, 3], [1], [3, 3], [2, 0]):
        batch = batch_of([PROMPTS[k] for k in some])
        output = model(**batch, labels=None)
        for row, k in zip(output.logits, some, strict=True):
            torch.testing.assert_close(row[-len(PROMPTS[k]) :], logits[k], rtol=1e-4, atol=1e-4)
        assert model(**batch, return_dict=False)[0].equal(output.logits)
        assert live.chosen == [CHOSEN[k] for k in some]
        for beams in (1, 2):
            given = {key: batch[key] for key in ("input_ids", "attention_mask")}
            found = model.generate(**given, **how, num_beams=beams)
            ends = [row[batch["input_ids"].shape[1] :].tolist() for row in found]
            assert ends == [said[k][beams] for k in some]
    early = said[2][1][0]  # a text that ends there gets pads, whether or not others are longer
    found = model.generate(**given, **how, eos_token_id=early)[0, batch["input_ids"].shape[1] :]
    assert found.tolist() == [early] + [0] * (len(found) - 1)
    assert live.reset() is model
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("act", ["choose", "use"])
def test_other_threads_wait_for_a_text(act: str, stored: Any, monkeypatch: Any) -> None:
    base, _, store = stored("llama", "lora")
    monkeypatch.setattr(routing.Gate, "scores", by_last_token)
    live = library.attach(model := loaded(base), store, base)
    ids, others = torch.tensor([PROMPTS[0]]), list[threading.Thread]()
    given = {"input_ids": ids - 1} if act == "choose" else {"tasks": "code"}

    def meanwhile(ids: Tensor, scores: Tensor) -> Tensor:
        if not others:
            others.append(threading.Thread(target=getattr(live, act), kwargs=given))
            others[0].start()
            others[0].join(0.3)  # it waits
        return scores

    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = live.route().generate(ids, **how)
    assert want.equal(model.generate(ids, **how, logits_processor=[meanwhile]))
    others[0].join()


def test_what_is_refused_or_ends_routing(stored: Any, monkeypatch: Any, capfd: Any) -> None:
    base, _, store = stored("llama", "lossless")
    live = library.attach(model := loaded(base), store, base)
    monkeypatch.setattr(routing.Gate, "scores", by_last_token)
    batch = batch_of(PROMPTS)
    for said, call in (
        ("begin with prompts", lambda: model(**batch, past_key_values=DynamicCache())),
        ("no common loss", lambda: model(**batch, labels=batch["input_ids"])),
        ("no task 'mth'", lambda: live.route(["mth"])),
        ("threshold is nan", lambda: live.route(threshold=math.nan)),
    ):
        live.route(threshold=0.5)
        with pytest.raises(UserError, match=said):
            call()
    live.route(threshold=2.0, explain=True)(**batch)
    assert live.chosen == [None] * 4 and live.current == {}
    assert capfd.readouterr().err.count("the base: ") == 4
    assert "forward" in vars(model) and "forward" not in vars(live.use("math"))
    other, _, adapters = stored("llama", "lora")
    flat = library.attach(loaded(other), adapters, other).route()
    layer = flat.get_submodule("model.layers.0.self_attn.v_proj")
    layer.register_forward_pre_hook(lambda module, args: (args[0].flatten(0, 1),), prepend=True)
    layer.register_forward_hook(lambda module, args, y: y.view(4, -1, y.shape[-1]), prepend=True)
    with pytest.raises(UserError, match="for 4 prompts, as of experts"):  # of which sequence?
        flat(**batch)
    edited = library.attach(loaded(other), adapters, other).route()
    edited.double()
    with pytest.raises(UserError, match="is not what was attached"):  # though no weights change
        edited(torch.tensor([[1, 2, 9]]))
    library.attach(live.reset(), store, base).route()
    library.attach(model, store, base)
    assert "forward" not in vars(model)
    for make in (worlds.of("T5", "ForConditionalGeneration"), partial(nn.Linear, 2, 1)):
        with pytest.raises(UserError, match="runs with `input_ids` alone"):
            routing.plain_texts(make(), None)
    bases = library.build(load(base), {t: load(base.parent / t) for t in TASKS}, num_bases=2)
    with pytest.raises(UserError, match="needs a store of all tasks"):
        library.attach(loaded(base), bases, load(base)).route()


def test_gates_come_and_go_with_their_task(stored: Any, tmp_path: Path) -> None:
    base, models, store = stored("llama", "sampled")
    held = load_file(store / "gates/math-1.safetensors")
    exact = load_file(stored("llama", "dense")[2] / "gates/math-1.safetensors")
    assert held.keys() == {
        f"model.layers.{k}.self_attn.{x}_proj.weight" for k in (0, 1) for x in "qkvo"
    }
    assert all(torch.equal(gate, exact[name]) for name, gate in held.items())  # not of the sample
    tvb("add", tmp_path / "grown", models[0], "--task", "math", "--base", base)
    for task, model in (("code", models[1]), ("safety", models[2])):
        tvb("add", tmp_path / "grown", model, "--task", task)
    tvb("remove", tmp_path / "grown", "--task", "math")
    names = {path.name.split("-")[0] for path in (tmp_path / "grown/gates").iterdir()}
    assert names == {*TASKS}  # the former state has it
    tvb("undo", tmp_path / "grown")
    live = library.attach(loaded(base), tmp_path / "grown", base)
    ids = torch.tensor([[1, 2, 3]])
    live.route()(ids)
    assert live.gate.tasks == [*TASKS]
    live.route(["code", "code", "math"])
    assert live.gate.tasks == ["code", "math"]
    own = {"idle": {}, "math": {name: gate.float() for name, gate in exact.items()}}
    texts = routing.plain_texts(model := loaded(base), None)
    found = routing.Gate(model, own, {}, texts).scores({"input_ids": ids})
    assert found[0, 0] == -math.inf and found.isfinite()[0, 1]  # no gates: never chosen
    (tmp_path / "grown/gates/math-1.safetensors").write_bytes(b"0" * 9)
    with pytest.raises(UserError, match="gates/math-1"):
        library.attach(loaded(base), tmp_path / "grown", base)


MATRICES = {
    "BertModel": ({}, "encoder.layer.0.attention", "self.query self.key self.value output.dense"),
    "GPTNeoXModel": ({}, "layers.0.attention", "query_key_value dense"),
    "MixtralModel": ({}, "layers.0.self_attn", "q_proj k_proj v_proj o_proj"),
    "T5Model": ({"d_model": 32, "num_layers": 2}, "encoder.block.0.layer.0.SelfAttention",
                "q k v o"),
    "GPT2Model": ({"n_embd": 32, "n_layer": 2, "n_head": 4}, "h.0.attn", "c_attn c_proj"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MATRICES)
def test_the_matrices_of_an_architecture(kind: str) -> None:
    keys, module, names = MATRICES[kind]
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 32}  # fmt: skip
    cls: Any = getattr(transformers, kind)
    with torch.device("meta"):
        model = cls(cls.config_class(vocab_size=32, **(keys or small)))
    matrices = [name for name, p in model.named_parameters() if p.dim() == 2]
    assert {*looked_at(matrices)[0]} == {f"{module}.{name}.weight" for name in names.split()}
    others = [name for name in matrices if module not in name]
    assert looked_at(others)[0] == [] != looked_at(others)[1]
