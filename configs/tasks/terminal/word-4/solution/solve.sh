ls
cat fig.txt
echo red > out.txt
