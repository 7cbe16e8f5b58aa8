"""`umbra check`: is the run file right, does it fit, and what does this machine lack?"""
