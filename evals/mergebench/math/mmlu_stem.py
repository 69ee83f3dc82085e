"""The subjects of MMLU that lm-eval's group `mmlu_stem` holds."""

import datasets

SUBJECTS = frozenset(
    """
    abstract_algebra anatomy astronomy college_biology college_chemistry
    college_computer_science college_mathematics college_physics computer_security
    conceptual_physics electrical_engineering elementary_mathematics high_school_biology
    high_school_chemistry high_school_computer_science high_school_mathematics
    high_school_physics high_school_statistics machine_learning
    """.split()
)


def only_stem(rows: datasets.Dataset) -> datasets.Dataset:
    return rows.select([i for i, subject in enumerate(rows["subject"]) if subject in SUBJECTS])
