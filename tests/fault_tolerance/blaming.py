"""What ranks raise, and which of them they name."""


def check_errors(errors, kind, *words):
    """Whether each rank raised such an error, in whose message there are all of the words.

    Args:
        errors (dict): As :func:`tests.ranks.errors_of_ranks` returns them, of one rank or more.
        kind (str): The name of the errors' type.
        *words (str): Parts of each message.
    """
    assert errors
    for rank, (found, message) in errors.items():
        assert found == kind, (rank, message)
        for word in words:
            assert word in message, (rank, message)
