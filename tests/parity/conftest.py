"""Each test of this folder has a slow twin, which checks that its comparisons are well conditioned."""

import pytest
from conditioning import check


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.fixturenames.append("is_perturbed")
    values = [
        pytest.param(False, id=pytest.HIDDEN_PARAM),
        pytest.param(True, id="perturbed", marks=pytest.mark.slow),
    ]
    metafunc.parametrize("is_perturbed", values)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not pyfuncitem.callspec.params["is_perturbed"]:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    check(lambda: pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
