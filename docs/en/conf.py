"""Sphinx's configuration of the English documents."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conf_common import *  # noqa: E402, F403

language = 'en'
html_title = 'mmdevplug'
html_context = {'other_language': ('zh_cn', '简体中文')}
