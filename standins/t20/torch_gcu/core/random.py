"""Seeds of all cards."""

from t20_card import calls, card, seeds

__all__ = ['manual_seed_all']


def manual_seed_all(seed):
    seed = int(seed)
    if not 0 <= seed < 2**32:
        raise ValueError(
            f'Seed must be a unint32 number which is between 0~4294967295, got {seed}'
        )
    calls['manual_seed_all'] += 1
    seeds.append(seed)
    card.seed_all(seed)
