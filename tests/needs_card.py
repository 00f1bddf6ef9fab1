"""A mark for tests whose processes install the stand-in card from a config or by themselves."""

import card
import pytest

needs_card = pytest.mark.skipif(card.MISSING is not None, reason=str(card.MISSING))
