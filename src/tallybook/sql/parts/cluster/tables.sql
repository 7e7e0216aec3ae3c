insert into tallybook.service (name, every) values ('rebase', '5 s');
