"""A vendor's package that nobody has heard of, with a backend of its own: see native_card."""

import native_card

zeta = native_card.install(native_card.ZETA)
