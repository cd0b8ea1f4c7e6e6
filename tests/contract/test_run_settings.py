"""Two buffer services of one run have the same settings, or the second one is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bapo.core.errors import ConfigError
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.requirements import refuse_other_settings
from buffer_service.store.redis.store import RedisStore
from buffer_service.store.run_image import EMPTY
from tests.support.buffer_app import small_config

RUN = {"name": "shared"}


@pytest.fixture
def link(redis_url: str) -> Iterator[RedisLink]:
    found = RedisLink(redis_url)
    yield found
    found.client.close()


def test_a_second_service_with_other_settings_is_refused_and_names_the_keys(link: RedisLink) -> None:
    refuse_other_settings(link, small_config(run=RUN))
    refuse_other_settings(link, small_config(run=RUN, buffer={"port": 8799}))  # where it listens is its own
    with pytest.raises(ConfigError) as refused:
        refuse_other_settings(
            link, small_config(run=RUN, algorithm={"batch_size": 4, "group_size": 7}, buffer={"lease_s": 7.5})
        )
    assert "algorithm.group_size = 7 instead of " in str(refused.value)
    assert "buffer.lease_s = 7.5 instead of " in str(refused.value)
    assert "batch_size" not in str(refused.value)
    refuse_other_settings(link, small_config(run={"name": "another"}, algorithm={"batch_size": 4, "group_size": 7}))


def test_a_run_that_was_dropped_may_begin_with_other_settings(link: RedisLink) -> None:
    refuse_other_settings(link, small_config(run=RUN))
    RedisStore(link, "shared", lease_s=60, max_attempts=3).restore(EMPTY, ())
    refuse_other_settings(link, small_config(run=RUN, algorithm={"batch_size": 4, "group_size": 7}))
