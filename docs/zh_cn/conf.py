"""Sphinx's configuration of the Chinese documents."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conf_common import *  # noqa: E402, F403

language = 'zh_CN'
html_title = 'mmdevplug'
html_context = {'other_language': ('en', 'English')}
