"""Installs the stand-in under the name in ``FAKECARD_NAME``, as a vendor's package would."""

import os

import card

card.install(os.environ['FAKECARD_NAME'], int(os.environ.get('FAKECARD_COUNT', '4')))
