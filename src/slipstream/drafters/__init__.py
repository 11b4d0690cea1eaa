"""How to propose: open, propose, observe, close."""
