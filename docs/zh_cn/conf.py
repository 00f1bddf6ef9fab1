"""Sphinx's configuration of the Chinese documents."""

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import conf_common  # noqa: E402
from conf_common import *  # noqa: E402, F403

language = 'zh_CN'
html_title = 'mmdevplug'
html_context = {'other_language': ('en', 'English')}

CHINESE = re.compile(r'[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]')


class JoinChineseLines(SphinxTransform):
    """Removes line breaks between Chinese characters, which a browser would show as spaces."""

    default_priority = 10

    def apply(self, **kwargs: Any) -> None:
        """Remove the nodes that MyST makes of line breaks."""
        for text in list(self.document.findall(nodes.Text)):
            siblings = text.parent.children
            place = text.parent.index(text)
            if text != '\n' or not 0 < place < len(siblings) - 1:
                continue
            before, after = siblings[place - 1].astext(), siblings[place + 1].astext()
            if CHINESE.match(before[-1:]) and CHINESE.match(after[:1]):
                text.parent.remove(text)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    conf_common.setup(app)
    app.add_transform(JoinChineseLines)
