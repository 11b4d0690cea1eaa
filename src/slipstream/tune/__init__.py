"""What will speculation gain here, with which settings, and why not more?"""
