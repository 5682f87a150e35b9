ls
cp fig.txt out.txt
