"""Whether a part is there and whole: what its file says, against the plan; blocking."""

from qinfer.bulk.parts import PartBroken, PartInfo, validate_part
from qinfer.bulk.plan import Plan, Shard
from qinfer.errors import StoreNotFound
from qinfer_workers.bulk.documents import StoreFor, part_url


def part_of(store_for: StoreFor, plan: Plan, shard: Shard) -> PartInfo | str:
    """Looks at the part of a shard.

    Returns:
        The part, or what is wrong with it.

    Raises:
        StoreError: The store does not tell.
    """
    url = part_url(plan, shard)
    try:
        return validate_part(store_for(url), url, shard, plan.job_id, plan.model_hash)
    except (PartBroken, StoreNotFound) as error:
        return error.message


def set_aside(store_for: StoreFor, plan: Plan, shard: Shard) -> None:
    """Makes the name of a broken part free, so that it can be made again; one that is gone stays so.

    One that another has made again meanwhile stays where it is.

    Raises:
        StoreError: The store fails.
    """
    url = part_url(plan, shard)
    store = store_for(url)
    found = store.stat(url)
    if found is not None and isinstance(part_of(store_for, plan, shard), str):
        store.set_aside(url, found.etag)
