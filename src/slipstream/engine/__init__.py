"""The loop: requests in, tokens out, whatever the drafter and the target."""
