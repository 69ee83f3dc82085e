"""Small local data sets and a scripted model, for lm_eval's own command without a network.

As a program it is the stock `lm_eval` with one more model and none of its own tasks. Of a list of
[text, answers], a prompt takes the first rule whose text is in it, and its answers in turn. Of
choices it likes best an answer. Without a rule: "" and nothing liked best.
"""

import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MERGEBENCH = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


def module(name: str) -> ModuleType:
    """A module beside the tasks, such as `math/math_answers`, imported afresh."""
    path = MERGEBENCH / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"mergebench_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def stage(home: Path, repo: str, config: str | None = None, **splits: Sequence[Row]) -> None:
    """Lay a Hub data set out in the cache below HF_HOME, as datasets leaves it there."""
    from datasets import DatasetInfo
    from datasets.arrow_writer import ArrowWriter
    from datasets.naming import camelcase_to_snakecase

    owner, _, name = repo.rpartition("/")
    name = camelcase_to_snakecase(name)
    where = home / "datasets" / f"{owner}___{name}" / (config or "default") / "0.0.0" / ("0" * 40)
    where.mkdir(parents=True)
    infos: dict[str, Any] = {}
    for split, rows in splits.items():
        with ArrowWriter(path=str(where / f"{name}-{split}.arrow")) as writer:
            for row in rows:
                writer.write(row)
            count, nbytes = writer.finalize()
            features = writer._features
        infos[split] = {"name": split, "num_bytes": nbytes, "num_examples": count,
                        "dataset_name": name}  # fmt: skip
    DatasetInfo(
        features=features, splits=infos, builder_name="parquet", dataset_name=name,
        config_name=config or "default", version="0.0.0",
    ).write_to_directory(str(where))  # fmt: skip


def lm_eval(
    home: Path, answers: Mapping[str, Sequence[str] | str], *options: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command with a model that gives these answers, offline, its data below `home`."""
    rules = [[text, [said] if isinstance(said, str) else list(said)]
             for text, said in answers.items()]  # fmt: skip
    (home / "answers.json").write_text(json.dumps(rules))
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "NLTK_DATA": str(home / "nltk")}
    model = ("--model", "scripted", "--model_args", f"script={home / 'answers.json'}")
    return subprocess.run(
        [sys.executable, __file__, "run", *model, *map(str, options)],
        env=env | variables, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def namespaces() -> bool:
    """Whether the kernel gives this user namespaces, asked without any code of the project."""
    flags = 0x00020000 | 0x10000000 | 0x20000000 | 0x40000000  # of mounts, users, PIDs, networks
    ask = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({flags}) != 0)"
    asked = sys.platform == "linux" and subprocess.run([sys.executable, "-c", ask])
    return bool(asked) and asked.returncode == 0


def main() -> None:
    import lm_eval.api.metrics
    import lm_eval.tasks
    import lm_eval.utils
    import torch.utils.collect_env
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model

    @register_model("scripted")
    class Scripted(LM):
        def __init__(self, script: str, **_: Any) -> None:
            super().__init__()
            rules: list[tuple[str, list[str]]] = json.loads(Path(script).read_text())
            self.rules = [(text, answers, itertools.cycle(answers)) for text, answers in rules]

        def _rule(self, prompt: str) -> tuple[list[str], Iterator[str]]:
            return next(((all_, each) for text, all_, each in self.rules if text in prompt),
                        ([], iter(())))  # fmt: skip

        def generate_until(self, requests: list[Instance]) -> list[str]:  # type: ignore[override]
            return [next(self._rule(request.args[0])[1], "") for request in requests]

        def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:  # type: ignore[override]
            pairs = (request.args for request in requests)
            liked = [word.strip() in self._rule(prompt)[0] for prompt, word in pairs]
            return [(0.0 if each else -100.0, each) for each in liked]

        def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:  # type: ignore[override]
            raise AssertionError("no task of ours asks for the likelihood of a whole text")

        tokenizer_name = "scripted"

    # lm-eval would read its own ten thousand YAML files
    lm_eval.tasks.TaskManager = functools.partial(  # type: ignore[misc,assignment]
        lm_eval.tasks.TaskManager, include_defaults=False
    )
    # Scores depend on none of these, which take a quarter of the time
    lm_eval.api.metrics.bootstrap_stderr = lambda *_, **__: 0.0
    lm_eval.utils.make_table = lambda *_: ""
    torch.utils.collect_env.get_pretty_env_info = str
    lm_eval.utils.env.from_string = functools.cache(lm_eval.utils.env.from_string)  # type: ignore[method-assign]
    cli_evaluate()


if __name__ == "__main__":
    main()
