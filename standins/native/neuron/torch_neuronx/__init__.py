"""Named like the package of AWS for Trainium, for tests: see native_card."""

import native_card

neuron = native_card.install(native_card.NEURON)
