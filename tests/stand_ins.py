"""Small local data sets and a scripted model, for lm_eval's own command without a network.

Run as a program this is the stock `lm_eval`, with one more model:

    python tests/stand_ins.py run --model scripted --model_args script=answers.json --tasks ...

`answers.json` is a list of [text, answers]. A prompt takes the first rule whose text is in it, and
its answers one after the other, from the first again when they are used up. What generates gets
them as they are; what chooses likes best the continuation that is an answer. Without a rule:
"" and nothing liked best. `log=FILE` keeps all requests, a line of JSON each.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


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


def lm_eval(home: Path, *options: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command with the scripted model at hand, offline, its data and caches below `home`."""
    return subprocess.run(
        [sys.executable, __file__, "run", *map(str, options)],
        env=offline(home) | variables, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def offline(home: Path) -> dict[str, str]:
    """The environment for a program that finds its data below `home` and nowhere else."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return env | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "NLTK_DATA": str(home / "nltk")}


def namespaces() -> bool:
    """Whether the kernel gives this user namespaces, asked without any code of the project."""
    flags = 0x00020000 | 0x10000000 | 0x20000000 | 0x40000000  # of mounts, users, PIDs, networks
    ask = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({flags}) != 0)"
    asked = sys.platform == "linux" and subprocess.run([sys.executable, "-c", ask])
    return bool(asked) and asked.returncode == 0


def results(out: Path) -> dict[str, Any]:
    """What the newest `--output_path OUT` holds."""
    newest = max(out.rglob("results_*.json"), key=lambda file: file.stat().st_mtime_ns)
    found: dict[str, Any] = json.loads(newest.read_text())
    return found


def scores(out: Path) -> dict[str, Any]:
    """task or group -> `score,none`."""
    return {name: values["score,none"] for name, values in results(out)["results"].items()
            if "score,none" in values}  # fmt: skip


def samples(out: Path, task: str) -> list[dict[str, Any]]:
    """What `--log_samples` kept of a task."""
    newest = max(
        out.rglob(f"samples_{task}_[0-9]*.jsonl"), key=lambda file: file.stat().st_mtime_ns
    )
    return [json.loads(line) for line in newest.read_text().splitlines()]


def main() -> None:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model

    @register_model("scripted")
    class Scripted(LM):
        def __init__(self, script: str, log: str | None = None, **_: Any) -> None:
            super().__init__()
            rules: list[tuple[str, list[str]]] = json.loads(Path(script).read_text())
            self.rules: list[tuple[str, list[str], Iterator[str]]] = [
                (text, answers, itertools.cycle(answers)) for text, answers in rules
            ]
            self.log = log

        def _rule(self, prompt: str) -> tuple[list[str], Iterator[str]]:
            return next(((all_, each) for text, all_, each in self.rules if text in prompt),
                        ([], iter(())))  # fmt: skip

        def _keep(self, kind: str, request: Instance) -> None:
            if self.log is not None:
                with open(self.log, "a") as file:
                    print(json.dumps({"kind": kind, "arguments": request.args}), file=file)

        def generate_until(self, requests: list[Instance]) -> list[str]:  # type: ignore[override]
            for request in requests:
                self._keep("generate_until", request)
            return [next(self._rule(request.args[0])[1], "") for request in requests]

        def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:  # type: ignore[override]
            found = []
            for request in requests:
                self._keep("loglikelihood", request)
                prompt, continuation = request.args
                liked = continuation.strip() in self._rule(prompt)[0]
                found.append((0.0 if liked else -100.0, liked))
            return found

        def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:  # type: ignore[override]
            raise AssertionError("no task of ours asks for the likelihood of a whole text")

        @property
        def tokenizer_name(self) -> str:
            return "scripted"

    cli_evaluate()


def script(path: Path, rules: Mapping[str, Sequence[str] | str]) -> Path:
    """Write rules for the scripted model."""
    pairs = [
        [text, [said] if isinstance(said, str) else list(said)] for text, said in rules.items()
    ]
    path.write_text(json.dumps(pairs))
    return path


if __name__ == "__main__":
    main()
