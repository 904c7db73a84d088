"""The demo: every part of lowtri in one run, each with its checks and its files.

    make demo                                  # a minute: every act, in short
    make tour                                  # the same acts at full size
    python examples/demo --part steps --part masks

tour    the acts, in the order of the mission
stage   what an act shows, how acts run, and the page that they make
"""
