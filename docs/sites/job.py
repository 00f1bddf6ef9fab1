"""One job of two ranks: MMEngine by itself first, then ours, all rows in the same processes."""

from docs.sites.devices import begin


def run_both(name, folder, ports):
    """What each row finds of MMEngine by itself, and with ours.

    Returns:
        dict: ``stock`` and ``ours``, each by row; ``restored``, what ``get_device`` says when
        MMEngine's own functions were put back.
    """
    begin(name)
    from mmengine.device import get_device

    from docs.sites.stock import facts_of_stock

    stock = facts_of_stock(name, folder, ports)

    from docs.sites.ours import facts_of_ours
    from mmdevplug.patches.mmengine import restore_mmengine

    ours = facts_of_ours(name, folder, ports)
    restore_mmengine()
    return dict(stock=stock, ours=ours, restored=get_device())
