"""`pyllama-dflash bench`: the instrument. Waves of requests, ours in brackets around another setting or a stock server.

plan.py      what is asked, checked                  measure.py           the whole run, as plain data
prompts.py   fixed prompts                           waves.py             what a wave is, and its rates
ours.py      runs a wave                             stock.py             so does a server; stock_process.py starts one
figures.py   numbers of many waves, brackets         traffic.py           launches and bytes of a round, by its graph
copying.py   what a large copy reaches               report.py, chart.py  Markdown and PNG
"""
