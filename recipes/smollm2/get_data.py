#!/usr/bin/env python
"""Make the fifteen data sets of evals/real from files on GitHub (about 20 MB).

    python recipes/smollm2/get_data.py FOLDER

FOLDER/NAME gets train.jsonl, test.jsonl, and the downloaded files in raw/. It gets its name when it
is complete, so the same command resumes. `--raw DIR` reads DIR/NAME/raw/ instead of the network.

The data are not ours. The command prints the licence of each set: several sets state none, and
multi30k excludes commercial use.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import click
import yaml

HOST = "https://raw.githubusercontent.com"
TABLE = Path(__file__).with_name("data.yml")
Items = Iterator[tuple[str, str]]  # of prompt and response


class Source(NamedTuple):
    """The files of a set, with their SHA-256, in one commit of a repository."""

    repository: str
    commit: str
    licence: str
    files: dict[str, str]


def raw_name(path: str) -> str:
    return path.replace("/", "__")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def lines(raw: Path, path: str, encoding: str = "utf-8") -> list[str]:
    """The stripped lines of a file. Only a newline ends a line."""
    data = (raw / raw_name(path)).read_bytes()
    if path.endswith(".gz"):
        data = gzip.decompress(data)
    return [line.strip() for line in data.decode(encoding).removesuffix("\n").split("\n")]


def sst2(raw: Path, split: str) -> Items:
    for line in lines(raw, f"data/stsa.binary.{split}"):
        label, text = line.split(" ", 1)
        yield f"Review: {text}\nSentiment:", ("negative", "positive")[int(label)]


def trec(raw: Path, split: str) -> Items:
    types = {"NUM": "number", "LOC": "location", "HUM": "human"}
    types |= {"DESC": "description", "ENTY": "entity", "ABBR": "abbreviation"}
    for line in lines(raw, f"data/raw/TREC.{split}", "latin-1"):
        label, text = line.split(" ", 1)
        yield f"Question: {text}\nType:", types[label.split(":")[0]]


def snli_small(raw: Path, split: str) -> Items:
    part = {"train": "dev", "test": "test"}[split]
    files = (lines(raw, f"dataset/eSNLI/{name}.{part}") for name in ("s1", "s2", "labels"))
    for premise, hypothesis, label in zip(*files, strict=True):
        yield f"Premise: {premise}\nHypothesis: {hypothesis}\nRelation:", label


def banking77(raw: Path, split: str) -> Items:
    for row in csv.DictReader(f"{line}\n" for line in lines(raw, f"banking_data/{split}.csv")):
        yield f"Customer: {row['text'].strip()}\nIntent:", row["category"].replace("_", " ")


def snips_slots(raw: Path, split: str) -> Items:
    files = (lines(raw, f"data/snips/{split}/seq.{name}") for name in ("in", "out"))
    for text, marks in zip(*files, strict=True):
        words, slots = text.split(), []
        for word, mark in zip(words, marks.split(), strict=True):
            if mark.startswith("B-"):
                slots.append(f"{mark[2:]}={word}")
            elif mark.startswith("I-"):
                slots[-1] += f" {word}"
        yield f"Command: {' '.join(words)}\nSlots:", "; ".join(slots)


def semeval2010_task8(raw: Path, split: str) -> Items:
    name = {"train": "training/TRAIN_FILE", "test": "testing_keys/TEST_FILE_FULL"}[split]
    found = lines(raw, f"corpus/SemEval2010_task8_{name}.TXT")
    for sentence, relation in zip(found[::4], found[1::4], strict=True):
        text = sentence.split("\t", 1)[1].strip('"').strip()
        yield f"Sentence: {text}\nRelation:", relation


def multi30k_en_de(raw: Path, split: str) -> Items:
    part = {"train": "train", "test": "test_2016_flickr"}[split]
    files = (lines(raw, f"data/task1/raw/{part}.{language}.gz") for language in ("en", "de"))
    for english, german in zip(*files, strict=True):
        yield f"English: {english}\nGerman:", german


def geoquery_sql(raw: Path, split: str) -> Items:
    queries = json.loads("\n".join(lines(raw, "data/geography.json")))
    found = [(query["sql"][0], sentence) for query in queries for sentence in query["sentences"]]
    for part in {"train": ("train", "dev"), "test": ("test",)}[split]:
        for sql, sentence in found:
            if sentence["question-split"] == part:
                question = sentence["text"]
                for name, value in sentence["variables"].items():
                    question, sql = question.replace(name, value), sql.replace(name, value)
                yield f"Question: {question}\nSQL:", " ".join(sql.replace("alias", "").split())


def inflection_en(raw: Path, split: str) -> Items:
    part = {"train": "train-high", "test": "test"}[split]
    for line in lines(raw, f"task1/surprise/english-{part}"):
        lemma, form, features = line.split("\t")
        yield f"{lemma} [{features}] =", form


def commonsenseqa(raw: Path, split: str) -> Items:
    part = {"train": "train", "test": "dev"}[split]
    for record in map(json.loads, lines(raw, f"data/v1.0/{part}_rand_split.jsonl")):
        question = record["question"]
        choices = "".join(f"{each['label']}. {each['text']}\n" for each in question["choices"])
        yield f"Question: {question['stem']}\n{choices}Answer:", record["answerKey"]


def tweets(name: str, *labels: str) -> Callable[[Path, str], Items]:
    def convert(raw: Path, split: str) -> Items:
        files = (lines(raw, f"datasets/{name}/{split}_{kind}.txt") for kind in ("text", "labels"))
        for text, label in zip(*files, strict=True):
            yield f"Tweet: {text}\n{name.capitalize()}:", labels[int(label)]

    return convert


def drawn(text: str, one_of: int) -> str:
    """The split of an item without an official one."""
    return "train" if int(hashlib.sha1(text.encode()).hexdigest(), 16) % one_of else "test"


def nl2bash(raw: Path, split: str) -> Items:
    files = (lines(raw, f"data/bash/all.{name}") for name in ("nl", "cm"))
    for task, command in zip(*files, strict=True):
        if drawn(task.lower(), 12) == split:
            yield f"Task: {task}\nShell:", command


def subj(raw: Path, split: str) -> Items:
    for label in ("objective", "subjective"):
        for line in lines(raw, f"data/raw/subj.{label}", "latin-1"):
            prompt = f"Sentence: {line}\nSubjective or objective?"
            if drawn(prompt, 10) == split:
                yield prompt, label


def cola(raw: Path, split: str) -> Items:
    parts = {"train": "in_domain_train", "test": "in_domain_dev out_of_domain_dev"}[split]
    for part in parts.split():
        for line in lines(raw, f"acceptability_corpus/cola_public/raw/{part}.tsv"):
            _, label, _, text = line.split("\t")
            yield f"Sentence: {text}\nAcceptable:", ("no", "yes")[int(label)]


SETS: dict[str, Callable[[Path, str], Items]] = {  # of the raw files and a split, train or test
    "sst2": sst2,
    "trec": trec,
    "snli_small": snli_small,
    "banking77": banking77,
    "snips_slots": snips_slots,
    "semeval2010_task8": semeval2010_task8,
    "multi30k_en_de": multi30k_en_de,
    "geoquery_sql": geoquery_sql,
    "inflection_en": inflection_en,
    "commonsenseqa": commonsenseqa,
    "tweet_offensive": tweets("offensive", "no", "yes"),
    "nl2bash": nl2bash,
    "subj": subj,
    "tweet_emotion": tweets("emotion", "anger", "joy", "optimism", "sadness"),
    "cola": cola,
}


def get_file(source: Source, path: str, given: Path | None) -> bytes:
    """The contents of a file, from a folder of raw files or from the network.

    Raises:
        OSError: the file is missing, or its checksum is wrong.
    """
    address = f"{HOST}/{source.repository}/{source.commit}/{path}"
    place = given / raw_name(path) if given else address
    advice = f"copy it from {address}" if given else "run the command again, or give --raw"
    try:
        if isinstance(place, Path):
            data = place.read_bytes()
        else:
            with urlopen(place, timeout=60) as answer:
                data = answer.read()
        found = f"SHA-256 {sha256(data)}"
        if sha256(data) == source.files[path]:
            return data
    except (OSError, HTTPException) as error:
        found = str(getattr(error, "reason", error))
    raise OSError(f"{place}: {found}, expected SHA-256 {source.files[path]}; {advice}")


def get_data(name: str, source: Source, folder: Path, given: Path | None) -> str:
    """Make the folder of a set, if it is missing; say its numbers of items.

    Raises:
        OSError: a file is missing or another one, or the folder cannot be written.
    """
    target = folder / name
    if target.exists():
        return f"{target} exists: nothing to do"
    raw = folder / f".partial-{name}" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for path, checksum in source.files.items():
        file = raw / raw_name(path)
        if not file.exists() or sha256(file.read_bytes()) != checksum:
            file.write_bytes(get_file(source, path, given))
    counts = []
    for split in ("train", "test"):
        records = [{"prompt": p, "response": f" {r}"} for p, r in SETS[name](raw, split)]
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (raw.parent / f"{split}.jsonl").write_bytes(text.encode())
        counts.append(f"{len(records)} {split}")
    os.replace(raw.parent, target)
    return f"{target}: {', '.join(counts)}"


@click.command
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--raw", metavar="DIR", type=click.Path(path_type=Path), help="Read DIR/NAME/raw/.")
@click.option("--only", multiple=True, type=click.Choice(list(SETS)), help="The set to make.")
def main(folder: Path, raw: Path | None, only: tuple[str, ...]) -> None:
    """Make the data sets of evals/real in FOLDER."""
    table = yaml.safe_load(TABLE.read_text())
    for name in dict.fromkeys(only or SETS):
        source = Source(**table[name])
        click.echo(f"{name}: github.com/{source.repository}, licence: {source.licence}")
        try:
            click.echo(get_data(name, source, folder, raw and raw / name / "raw"))
        except OSError as error:
            raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
