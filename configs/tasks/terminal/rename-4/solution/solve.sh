ls
mv fig.txt out.txt
