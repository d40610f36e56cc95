"""Requests that schemathesis makes up from /openapi.json: whatever they are, the server is fine."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

import tests.serve.clients.schemathesis_hooks  # noqa: F401  mends half of them, to be answered

# The most are made up for a route whose requests have a body; others have hardly any to choose.
QUICK, LONG = 6, 300


def statuses_of(operation, mode, num):
    """Ask so many times; how it was answered."""
    statuses = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        derandomize=num == QUICK,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # a failure need not be made small: it prints how to repeat it
    )
    def ask(case):
        response = case.call()
        statuses.add(response.status_code)
        assert response.status_code < 500, f"{case.as_curl_command()}: {response.text}"

    ask()
    return statuses


# Of hypothesis about its own generator, with Python 3.14.
@pytest.mark.filterwarnings("ignore:It looks like `register_random`")
@pytest.mark.parametrize("num", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_good", [True, False])
def test_no_request_makes_it_fail(server, num, is_good):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    mode = schemathesis.GenerationMode.POSITIVE if is_good else schemathesis.GenerationMode.NEGATIVE
    operations = [found.ok() for found in schema.get_all_operations()]
    # Nothing can be wrong with a request that has no body.
    asked = [one for one in operations if is_good or one.method == "post"]
    statuses = {one.label: statuses_of(one, mode, num) for one in asked}
    if is_good:
        assert any(200 in found for label, found in statuses.items() if label.startswith("POST"))
    else:
        assert all(400 in found for found in statuses.values())
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.chat(max_tokens=2).status_code == 200
