"""What ``mmdevplug doctor``, ``check`` and ``conformance`` look at.

One module for each section of the doctor's report; ``conformance/`` holds the checks of a card.
"""
