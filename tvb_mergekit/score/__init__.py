"""Tables of benchmark scores from lm-eval's result files: the library behind `tvb score`.

    from tvb_mergekit.score import examine, markdown, read_benchmark, read_results, table

    found = table(
        read_benchmark("mergebench"),
        {"merged": read_results("out/merged")},
        specialists={"math": read_results("out/math"), "coding": read_results("out/coding")},
        partial=True,
    )
    print(markdown(examine(found)))  # with paired differences, if there are samples

Scores are percent.
"""

from tvb_mergekit.score.benchmark import read_benchmark
from tvb_mergekit.score.columns import read_reference
from tvb_mergekit.score.examining import examine
from tvb_mergekit.score.results import read_results
from tvb_mergekit.score.table import table
from tvb_mergekit.score.text import markdown

__all__ = ["examine", "markdown", "read_benchmark", "read_reference", "read_results", "table"]
