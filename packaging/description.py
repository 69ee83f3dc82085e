"""README.md as a package index shows it, where links into the repository lead nowhere.

hatchling runs this when it builds. With `Repository` in [project.urls] the links are those of a
repository on GitHub. Without it they name files of the source archive, and the picture goes.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


class Description(MetadataHookInterface):
    """The field `readme`, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict) -> None:
        home = metadata.get("urls", {}).get("Repository", "").rstrip("/")

        def absolute(link: re.Match) -> str:
            picture, text, path = link.groups()
            if home:
                return f"{picture}[{text}]({home}/{'raw' if picture else 'blob'}/HEAD/{path})"
            return "" if picture else f"{text} ({path.partition('#')[0]})"

        text = LINK.sub(absolute, Path(self.root, "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
