"""What does the command line do differently for each kind of algorithm: check, build, restore, estimate, evaluate?"""
