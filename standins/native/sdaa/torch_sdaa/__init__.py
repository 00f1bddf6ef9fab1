"""Named like Tecorigin's package, for tests: see native_card."""

import native_card

sdaa = native_card.install(native_card.SDAA)
