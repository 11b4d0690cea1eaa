"""Does a drafter serve as it trained? Answers to probe it with, comparisons, and causes."""
