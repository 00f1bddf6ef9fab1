"""What both languages share: ``docs/en/conf.py`` and ``docs/zh_cn/conf.py`` import all of it.

The theme is sphinx_rtd_theme, from which OpenMMLab's derives: OpenMMLab's own is on no package
index, and the ``pytorch_sphinx_theme`` there is PyTorch's of 2018: with its logo, menus and
newsletter, and without the scripts that it loads.
"""

import os
import sys
from pathlib import Path
from typing import Any, Dict

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

project = 'mmdevplug'
author = 'mmdevplug authors'
copyright = author

_version: Dict[str, Any] = {}
exec((ROOT / 'mmdevplug' / 'version.py').read_text(encoding='utf-8'), _version)
version = release = _version['__version__']

extensions = [
    'myst_parser',
    'sphinx.ext.autodoc',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
    'sphinx_copybutton',
]
templates_path = ['../_templates']
html_theme = 'sphinx_rtd_theme'
html_theme_options = dict(navigation_depth=3, collapse_navigation=False)
html_static_path = ['../_static']
html_css_files = ['wide.css']
html_show_sourcelink = False

# Links to headings of Markdown pages, as GitHub makes them.
myst_heading_anchors = 4
myst_enable_extensions = ['colon_fence']

autodoc_default_options = {'members': True, 'show-inheritance': True}
autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
autodoc_typehints_format = 'short'
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Else each attribute of a named tuple would be described twice.
napoleon_use_ivar = True

# The other language lies beside this one when both are built; tests/test_docs.py checks these.
linkcheck_ignore = [r'\.\./(en|zh_cn)/']
linkcheck_timeout = 20


class LinksBetweenLanguages(SphinxTransform):
    """Leads links such as ``../zh_cn/samples.md``, right on GitHub, to the built page."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        """Replace references that leave the folder of this language."""
        for node in list(self.document.findall(addnodes.pending_xref)):
            target = Path(self.env.srcdir) / (node.get('reftarget') or '')
            page = Path(os.path.normpath(target))
            if node.get('refdomain') != 'doc' or Path(self.env.srcdir) in page.parents:
                continue
            language, *rest = page.relative_to(DOCS).parts if DOCS in page.parents else ('', '')
            if language in ('en', 'zh_cn') and len(rest) == 1:
                uri = f'../{language}/{rest[0]}.html'
                node.replace_self(nodes.reference('', '', *node.children, refuri=uri))
            else:
                # A page of the repository in no document, e.g. standins/README.md: its name goes
                # behind the text of the link, unless that is the name.
                name = f'{page.relative_to(ROOT)}.md'
                after = [] if name in node.astext() else [nodes.Text(f' ({name})')]
                node.replace_self([*node.children, *after])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_transform(LinksBetweenLanguages)
