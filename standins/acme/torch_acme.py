"""What the maker of the card "acme" would ship: importing it registers the card with PyTorch."""

import card

card.install('acme', count=2)
