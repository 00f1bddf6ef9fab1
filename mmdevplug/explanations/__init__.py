"""Turn errors of the libraries below into messages that say what to do."""
