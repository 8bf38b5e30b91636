module example.org/qinfer

go 1.19
