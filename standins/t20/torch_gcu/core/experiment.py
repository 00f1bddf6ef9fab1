"""What the vendor calls experimental."""

from t20_card import calls

__all__ = ['set_graph_threshold']


def set_graph_threshold(threshold):
    calls['set_graph_threshold'] += 1
