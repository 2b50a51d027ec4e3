"""Check that a machine computes, fails and goes on as it must."""
